"""Gunicorn as its documentation has it for applications like this: synchronous workers behind nginx, one a core."""

import os

bind = f"unix:{os.environ['OLD_STACK_SOCKET']}"  # noqa: TID251
workers = int(os.environ["OLD_STACK_WORKERS"])  # noqa: TID251
worker_class = "sync"
timeout = 120
control_socket_disable = True
