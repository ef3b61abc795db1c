from spool.client.requests import Change as Change
from spool.client.waiting import End as End
from spool.core.errors import InvalidJob as InvalidJob
from spool.core.errors import NoSuchJob as NoSuchJob
from spool.core.errors import SpoolError as SpoolError
from spool.core.errors import SpoolUnusable as SpoolUnusable
from spool.core.model import State as State
from spool.python.client import Client as Client
from spool.query.explain import Explanation as Explanation
from spool.query.jobs import JobFilter as JobFilter
from spool.query.jobs import JobList as JobList
from spool.query.jobs import JobRow as JobRow

__version__: str
