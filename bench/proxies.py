# SPDX-License-Identifier: Apache-2.0
"""The commands that start Headrace's router, nginx, HAProxy and a bare pump in front of a server.

All with one worker, without access log, and with connections to the server behind that are kept. The files of nginx and
HAProxy are written before each start, under .work/.
"""

import sys
from pathlib import Path

from bench.errors import BenchError
from bench.server import Launch, Ports, program

WORK = Path(__file__).parent / ".work/proxies"
NGINX = """daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr warn;
events { worker_connections 1024; }
http {
  access_log off;
  client_body_temp_path temporary/body;
  proxy_temp_path temporary/proxy;
  fastcgi_temp_path temporary/fastcgi;
  uwsgi_temp_path temporary/uwsgi;
  scgi_temp_path temporary/scgi;
  keepalive_requests 100000000;
  upstream behind { server 127.0.0.1:%(backend)d; keepalive 64; keepalive_requests 100000000; }
  server {
    listen 127.0.0.1:%(http)d;
    location / { proxy_pass http://behind; proxy_http_version 1.1; proxy_set_header Connection ""; }
  }
}
"""
HAPROXY = """global
  nbthread 1
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
  http-reuse always
frontend asked
  bind 127.0.0.1:%(http)d
  default_backend behind
backend behind
  server one 127.0.0.1:%(backend)d
"""


def headrace_router(ports: Ports) -> Launch:
    command = str(Path(sys.executable).with_name("headrace"))
    return Launch([command, "router", "--backend", f"http://127.0.0.1:{ports.backend}", "--port", str(ports.http)])


def pump(ports: Ports) -> Launch:
    file = Path(__file__).parent / "peers/pump/pump_server.py"
    return Launch([sys.executable, str(file), str(ports.http), str(ports.backend)])


def nginx(ports: Ports) -> Launch:
    file = _written("nginx.conf", NGINX, ports)
    Path(file.parent, "temporary").mkdir(exist_ok=True)
    return Launch([_found("nginx"), "-p", str(file.parent), "-e", "stderr", "-c", str(file)])


def haproxy(ports: Ports) -> Launch:
    return Launch([_found("haproxy"), "-db", "-f", str(_written("haproxy.cfg", HAPROXY, ports))])


def _written(name: str, text: str, ports: Ports) -> Path:
    WORK.mkdir(parents=True, exist_ok=True)
    file = WORK / name
    file.write_text(text % {"http": ports.http, "backend": ports.backend})
    return file


def _found(name: str) -> str:
    path = program(name)
    if path is None:
        raise BenchError(f"{name} is not installed")
    return path
