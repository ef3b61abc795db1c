"""`spool run --here`: a job whose command runs in the terminal of who submits it.

`spool run` has a child in its own terminal, session and process group, which the job's `terminal` names (`command.py`).
When it is the job's turn, the dispatcher only tells that (`launching.py`), and the child becomes the wrapper. So keys,
job control and pipes are those of any program that a shell starts, and what ends, limits and measures a run is as ever.
"""
