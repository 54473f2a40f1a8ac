"""The HTTP server as an ASGI app: routers, middlewares and error handlers around one GenerationService.

    web pages -> CORS -> API keys -> JSON -> body limit (-> another process) -> router -> route -> service

Everything a route needs hangs on `app.state`; there is no module state, so tests and several servers can live side by side.
Starting the app starts nothing else: whoever calls `create_app` owns the service and its life.
"""

from __future__ import annotations

import time

import msgspec
from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute

from jaxserve.config import ServerArgs
from jaxserve.parsers.message import message_format
from jaxserve.server.anthropic import protocol as anthropic_protocol
from jaxserve.server.anthropic import routes as anthropic
from jaxserve.server.control import routes as control
from jaxserve.server.control.endpoints import control_routers, documented_bodies
from jaxserve.server.elsewhere import Place
from jaxserve.server.http import health, metrics
from jaxserve.server.http.auth import OPEN_PREFIXES, AuthMiddleware
from jaxserve.server.http.browsers import BrowserGuard, BrowserPolicy
from jaxserve.server.http.content_type import JsonBodyMiddleware
from jaxserve.server.http.docs import DocumentedApp
from jaxserve.server.http.errors import install_error_handlers
from jaxserve.server.http.limits import BodyLimitMiddleware
from jaxserve.server.http.pass_on import PassOnMiddleware
from jaxserve.server.http.root_path import RootPathMiddleware
from jaxserve.server.http.routed_rank import RoutedRankMiddleware
from jaxserve.server.http.service import GenerationService
from jaxserve.server.http.trace_context import TraceMiddleware
from jaxserve.server.native import encode, generate, parsing, tokens
from jaxserve.server.ollama import models as ollama_models
from jaxserve.server.ollama import protocol as ollama_protocol
from jaxserve.server.ollama import routes as ollama
from jaxserve.server.openai import chat, classify, completions, embeddings, models, protocol, rerank, responses
from jaxserve.server.openai import score as openai_score
from jaxserve.server.openai.context import OpenAIContext
from jaxserve.server.openai.fim import chosen_format
from jaxserve.server.openai.responses.protocol import ResponsesRequest
from jaxserve.server.openai.responses.store import ResponseStore
from jaxserve.server.openai.system_messages import InlineSystem
from jaxserve.server.token_texts import TokenTexts
from jaxserve.server.version import package_version
from jaxserve.server.web import routes as web

# Bodies that msgspec parses; /docs shows them.
_BODIES: tuple[type[msgspec.Struct], ...] = (
    tokens.TokenizeRequest,
    tokens.DetokenizeRequest,
    parsing.ParseFunctionCallRequest,
    parsing.SeparateReasoningRequest,
    protocol.CompletionRequest,
    protocol.ChatCompletionRequest,
    embeddings.EmbeddingRequest,
    classify.ClassifyRequest,
    rerank.RerankRequest,
    openai_score.ScoreRequest,
    encode.EncodeRequest,
    ResponsesRequest,
    anthropic_protocol.MessagesRequest,
    anthropic_protocol.CountTokensRequest,
    ollama_protocol.OllamaChatRequest,
    ollama_protocol.OllamaGenerateRequest,
    ollama_protocol.OllamaShowRequest,
)


def create_app(tokenizer_manager: GenerationService, args: ServerArgs, place: Place | None = None) -> FastAPI:
    """`place`: of a front process, which passes on what other processes answer; None: of the process that answers all."""
    admin_router, control_router = control_routers()
    bodies = (*_BODIES, *documented_bodies())
    app = DocumentedApp(
        bodies,
        open_prefixes=OPEN_PREFIXES,
        title="jaxserve",
        version=package_version(),
        description="An LLM inference server on JAX.",
        servers=[{"url": args.fastapi_root_path}] if args.fastapi_root_path else None,
    )
    app.state.service = tokenizer_manager
    app.state.args = args
    app.state.token_texts = TokenTexts(tokenizer_manager.decode, tokenizer_manager.token_bytes)
    app.state.openai = OpenAIContext(
        tokenizer_manager,
        args,
        app.state.token_texts,
        started_s=int(time.time()) if place is None else place.started_s,
        inline_system=InlineSystem(tokenizer_manager),
        message_format=message_format(args.reasoning_parser, args.tool_call_parser),
        completion_template=chosen_format(args.completion_template),
    )
    app.state.responses = ResponseStore(args.max_stored_responses, place)
    app.state.started_monotonic_s = time.monotonic()
    routers = (
        health.router,
        metrics.router,
        generate.router,
        encode.router,
        tokens.router,
        parsing.router,
        models.router,
        completions.router,
        chat.router,
        embeddings.router,
        classify.router,
        rerank.router,
        openai_score.router,
        responses.router,
        anthropic.router,
        ollama.router,
        ollama_models.router,
        control.router,
        control_router,
        admin_router,
    )
    for router in routers:
        app.include_router(router)
    if not args.disable_web:
        app.include_router(web.router)
    install_error_handlers(app)
    admin_paths = [route.path for route in admin_router.routes if isinstance(route, APIRoute)]
    # The last one added is the outermost.
    if place is not None:
        of_server = (metrics.router, control.router, control_router, admin_router)
        main_paths = [route.path for router in of_server for route in router.routes if isinstance(route, APIRoute)]
        app.add_middleware(PassOnMiddleware, place=place, main_paths=main_paths, root_path=args.fastapi_root_path or "")
    app.add_middleware(RoutedRankMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_body_size_mb=args.max_body_size_mb)
    app.add_middleware(JsonBodyMiddleware)
    app.add_middleware(AuthMiddleware, api_key=args.api_key, admin_api_key=args.admin_api_key, admin_paths=admin_paths)
    # To all that come this far: the guard has refused the others.
    app.add_middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
    policy = BrowserPolicy(args.host, args.allowed_origins, has_key=args.api_key is not None)
    app.add_middleware(BrowserGuard, policy=policy, control_paths=admin_paths)
    if args.enable_trace and tokenizer_manager.tracer is not None:
        app.add_middleware(TraceMiddleware, tracer=tokenizer_manager.tracer)
    if tokenizer_manager.metrics is not None:
        app.add_middleware(
            metrics.HttpMetricsMiddleware,
            counts=tokenizer_manager.metrics,
            routes=[*app.routes, *(route for router in routers for route in router.routes)],
            labels_header=args.tokenizer_metrics_custom_labels_header,
        )
    if args.fastapi_root_path:
        app.add_middleware(RootPathMiddleware, root_path=args.fastapi_root_path)
    return app
