"""Operations on a spool that do not need the lock."""
