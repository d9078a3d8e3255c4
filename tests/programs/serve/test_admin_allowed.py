# SPDX-License-Identifier: Apache-2.0
import asyncio

import pytest

from headrace.core.telemetry.tracing import NO_TRACING
from headrace.engine.engine import EngineSettings, open_engine
from headrace.net.sockets import Address
from headrace.programs.serve.protocols import build_protocols
from headrace.programs.serve.settings import ServerSettings


@pytest.mark.parametrize("allowed", [True, False])
def test_admin_is_served_only_where_it_is_allowed(allowed):
    async def paths():
        settings = ServerSettings(http=Address("127.0.0.1"), grpc=None, allow_admin=allowed)
        engine = open_engine(EngineSettings())
        protocols = build_protocols(engine, settings, NO_TRACING, None)
        return {path for _, path in protocols.site.routes.listed()}

    served = asyncio.run(paths())
    assert any(path.startswith("/admin/") for path in served) is allowed
    assert "/v2" in served
