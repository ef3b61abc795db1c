from spool.client.requests import Change as Change
from spool.client.requests import ChangeKind as ChangeKind
from spool.client.waiting import End as End
from spool.core.accounting import RunFilter as RunFilter
from spool.core.accounting import Statistics as Statistics
from spool.core.errors import InvalidConfig as InvalidConfig
from spool.core.errors import InvalidFile as InvalidFile
from spool.core.errors import InvalidJob as InvalidJob
from spool.core.errors import InvalidRecord as InvalidRecord
from spool.core.errors import InvalidValue as InvalidValue
from spool.core.errors import NoSuchJob as NoSuchJob
from spool.core.errors import NotAllSubmitted as NotAllSubmitted
from spool.core.errors import SpoolError as SpoolError
from spool.core.errors import SpoolUnusable as SpoolUnusable
from spool.core.errors import UsageError as UsageError
from spool.core.model import State as State
from spool.extras.functions.executor import Cancelled as Cancelled  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import Executor as Executor  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import Future as Future  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import JobFailed as JobFailed  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import Lost as Lost  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import OutOfMemory as OutOfMemory  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import RemoteError as RemoteError  # type: ignore[import-not-found, unused-ignore]
from spool.extras.functions.executor import TimedOut as TimedOut  # type: ignore[import-not-found, unused-ignore]
from spool.python.asynchronous import AsyncClient as AsyncClient
from spool.python.client import Client as Client
from spool.python.client import Job as Job
from spool.python.client import WaitedJobs as WaitedJobs
from spool.python.client import as_completed as as_completed
from spool.python.client import job as job
from spool.python.client import wait_all as wait_all
from spool.python.client import wait_any as wait_any
from spool.query.details import RunDetails as RunDetails
from spool.query.explain import Explanation as Explanation
from spool.query.explain import Preview as Preview
from spool.query.machine import GpuList as GpuList
from spool.query.rows import JobFilter as JobFilter
from spool.query.rows import JobList as JobList
from spool.query.rows import JobRow as JobRow

__version__: str
