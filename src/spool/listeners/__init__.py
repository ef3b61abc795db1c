"""Who is told of events. The dispatcher writes them down and knows none of the listeners."""
