"""Certificates: renewed while the server runs, behind a password, under an authority. And the path of a proxy."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fake_service import FakeService
from http_harness import app_client, live_server, self_signed, until

from jaxserve.config import ServerArgs
from jaxserve.server.http import tls


def text_of(path: str) -> str:
    return Path(path).read_text()


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


async def certificate_at(url: str) -> str:
    address = (urlsplit(url).hostname or "", urlsplit(url).port or 0)
    return await asyncio.to_thread(ssl.get_server_certificate, address)


async def test_a_renewed_certificate_is_used_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "_LOOK_EVERY_S", 0.02)
    certificate, key = self_signed(tmp_path / "served")
    new_certificate, new_key = self_signed(tmp_path / "new")
    first, second = text_of(certificate), text_of(new_certificate)
    async with live_server(FakeService(), ssl_certfile=certificate, ssl_keyfile=key, enable_ssl_refresh=True) as url:
        context = ssl.create_default_context(cafile=certificate)
        async with httpx.AsyncClient(base_url=url, verify=context) as old_client:
            assert (await old_client.get("/health")).status_code == 200
            shutil.copy(new_certificate, certificate)  # its key is not there yet
            await until(lambda: "cannot be used" in caplog.text)
            assert await certificate_at(url) == first
            shutil.copy(new_key, key)

            async with asyncio.timeout(10):
                while await certificate_at(url) != second:  # noqa: ASYNC110 (nobody says when)
                    await asyncio.sleep(0.02)
            assert (await old_client.get("/health")).status_code == 200, "connections that stand stay"
        async with httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=new_certificate)) as client:
            assert (await client.get("/health")).status_code == 200


async def test_a_key_file_with_a_password(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    locked = str(tmp_path / "locked.pem")
    openssl("ec", "-in", key, "-aes256", "-passout", "pass:word", "-out", locked)
    options = {"ssl_certfile": certificate, "ssl_keyfile": locked, "ssl_keyfile_password": "word"}
    async with live_server(FakeService(), **options) as url:
        assert await certificate_at(url) == text_of(certificate)
    assert ServerArgs(model_path="m", **options).public_dict()["ssl_keyfile_password"] == "***"


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_keyfile_password"])
def test_options_of_tls_need_a_certificate(option: str) -> None:
    with pytest.raises(ValueError, match="needs --ssl-certfile and --ssl-keyfile"):
        ServerArgs(model_path="m", **{option: "x"})


async def test_certificates_above_are_sent_along(tmp_path: Path) -> None:
    """The client trusts the root alone, and the server's file holds its own certificate alone."""
    root, root_key = self_signed(tmp_path / "root")

    def signed(name: str, by: tuple[str, str], extension: str) -> tuple[str, str]:
        key, request, made = (str(tmp_path / f"{name}.{kind}") for kind in ("key", "csr", "pem"))
        (tmp_path / "extension").write_text(extension)
        new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"]
        openssl("req", *new, "-keyout", key, "-out", request)
        sign = ["-CA", by[0], "-CAkey", by[1], "-CAcreateserial", "-days", "2", "-extfile", str(tmp_path / "extension")]
        openssl("x509", "-req", "-in", request, *sign, "-out", made)
        return made, key

    middle = signed("middle", (root, root_key), "basicConstraints=critical,CA:TRUE")
    certificate, key = signed("leaf", middle, "subjectAltName=IP:127.0.0.1")
    trusted = ssl.create_default_context(cafile=root)
    async with (
        live_server(FakeService(), ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=middle[0]) as url,
        httpx.AsyncClient(base_url=url, verify=trusted) as client,
    ):
        assert (await client.get("/health")).status_code == 200


async def test_the_path_of_a_proxy_comes_off_before_keys_are_checked() -> None:
    options = {"fastapi_root_path": "/llm/v2", "api_key": "a", "admin_api_key": "b"}
    async with app_client(FakeService(), **options) as client:
        for path in ("/health", "/llm/v2/health"):
            assert (await client.get(path)).status_code == 200
        described = (await client.get("/llm/v2/openapi.json")).json()
        assert described["servers"] == [{"url": "/llm/v2"}]
        key = {"Authorization": "Bearer a"}
        for path in ("/flush_cache", "/llm/v2/flush_cache"):
            assert (await client.post(path, headers=key)).status_code == 401, "it takes the admin key"
        assert (await client.post("/llm/v2/llm/v2/flush_cache", headers=key)).status_code == 404
        assert (await client.get("/llm/v2x/health", headers=key)).status_code == 404
        reply = await client.post("/llm/v2/generate", json={"text": "a"}, headers=key)
        assert (reply.status_code, bool(reply.json()["text"])) == (200, True)
    for wrong in ("llm", "/llm/", "/", "/a b"):
        with pytest.raises(ValueError, match="--fastapi-root-path begins with /"):
            ServerArgs(model_path="m", fastapi_root_path=wrong)
