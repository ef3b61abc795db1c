"""`python -m spool.listeners SPOOL`: the process of the listeners of one spool, a child of the dispatcher."""

from spool.listeners.process import main

if __name__ == "__main__":
    main()
