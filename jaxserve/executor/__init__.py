"""The execution core: ForwardBatch, the jitted step, the sampler, the mesh. Entry point: `build_runner`."""

from jaxserve.executor.build import BuiltRunner, build_runner, fill_cache
from jaxserve.executor.model_runner import ModelRunner

__all__ = ["BuiltRunner", "ModelRunner", "build_runner", "fill_cache"]
