"""Which of several replicas of a model serves a request. Plain data and NumPy: no sockets, no processes, no clock."""

from jaxserve.data_parallel.controller import DataParallelController as DataParallelController
from jaxserve.data_parallel.controller import ReplicaUnavailableError as ReplicaUnavailableError
from jaxserve.data_parallel.policies import CacheAware as CacheAware
from jaxserve.data_parallel.policies import make_policy as make_policy
from jaxserve.data_parallel.prompt import Prompt as Prompt
from jaxserve.data_parallel.replica import Load as Load
from jaxserve.data_parallel.replica import Replica as Replica
from jaxserve.data_parallel.replica import ReplicaState as ReplicaState
from jaxserve.data_parallel.replica import Ticket as Ticket
