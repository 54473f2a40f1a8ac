"""Every option there is: `args` has them, `names` what they may be, `checks` what must hold of them,
`kv_events` what the one of that name holds."""

from jaxserve.config.addresses import split_address as split_address
from jaxserve.config.args import ServerArgs as ServerArgs
from jaxserve.config.args import by_field as by_field
from jaxserve.config.checks import check_key as check_key
from jaxserve.config.kv_events import KVEventsConfig as KVEventsConfig
from jaxserve.config.kv_events import endpoint_of as endpoint_of
from jaxserve.config.names import ALIASES as ALIASES
from jaxserve.config.names import DTYPES as DTYPES
from jaxserve.config.names import EVICTION_POLICIES as EVICTION_POLICIES
from jaxserve.config.names import KV_CACHE_DTYPES as KV_CACHE_DTYPES
from jaxserve.config.names import LARGEST_PAGE_SIZE as LARGEST_PAGE_SIZE
from jaxserve.config.names import LOG_LEVELS as LOG_LEVELS
from jaxserve.config.names import METRIC_BUCKETS as METRIC_BUCKETS
from jaxserve.config.names import QUANTIZATIONS as QUANTIZATIONS
