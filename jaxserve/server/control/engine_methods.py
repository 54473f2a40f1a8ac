"""The Engine's methods for control requests, derived from their declarations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from jaxserve.scheduler.control.declaration import Control, ControlStruct
from jaxserve.scheduler.control.registry import controls


class Controllable(Protocol):
    def control(self, request: ControlStruct) -> Any: ...

    async def async_control(self, request: ControlStruct) -> Any: ...


def add_control_methods(engine: type[Controllable], has: Callable[[Control], bool] = lambda control: True) -> None:
    """One method per control request that it `has`; its parameters are the request's fields, its result is the reply struct,
    unless the declaration names another. What only follows another request, or is asked by a larger method, has none."""
    follows = {control.then for control in controls().values()}
    for control in filter(has, controls().values()):
        if control.has_method and control.request not in follows:
            setattr(engine, control.name, _method(control))
        if control.has_async_method:
            setattr(engine, f"async_{control.name}", _async_method(control))


def _method(control: Control) -> Callable[..., Any]:
    signature = _signature(control)

    def method(*args: Any, **kwargs: Any) -> Any:
        engine, request = _bind(control, signature, args, kwargs)
        return _result(control, engine.control(request))

    return _described(method, control.name, control, signature)


def _async_method(control: Control) -> Callable[..., Any]:
    signature = _signature(control)

    async def method(*args: Any, **kwargs: Any) -> Any:
        engine, request = _bind(control, signature, args, kwargs)
        return _result(control, await engine.async_control(request))

    return _described(method, f"async_{control.name}", control, signature)


def _signature(control: Control) -> inspect.Signature:
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for field in msgspec.structs.fields(control.request):
        default = inspect.Parameter.empty if field.required else field.default
        parameters.append(inspect.Parameter(field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def _bind(
    control: Control, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Controllable, ControlStruct]:
    """The engine and the request that a call means."""
    arguments = signature.bind(*args, **kwargs).arguments
    engine: Controllable = arguments.pop("self")
    return engine, control.request(**arguments)


def _result(control: Control, reply: Any) -> Any:
    return control.result(reply) if isinstance(reply, control.reply) else reply  # what a route said is shaped already


def _described(method: Callable[..., Any], name: str, control: Control, signature: inspect.Signature) -> Callable[..., Any]:
    method.__name__ = method.__qualname__ = name
    method.__doc__ = control.request.__doc__
    method.__signature__ = signature  # type: ignore[attr-defined]
    return method
