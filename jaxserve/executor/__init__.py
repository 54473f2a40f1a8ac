"""The execution core: ForwardBatch, the jitted step, the sampler, the mesh. Entry point: `build_runner`."""

from jaxserve.executor.build import BuiltRunner, Filled, build_runner, fill_cache
from jaxserve.executor.executable_cache import source_digest
from jaxserve.executor.model_runner import ModelRunner
from jaxserve.executor.warmup import cache_folder

__all__ = ["BuiltRunner", "Filled", "ModelRunner", "build_runner", "cache_folder", "fill_cache", "source_digest"]
