"""The app of the Celery workers that the tests start, configured by a variable."""

from __future__ import annotations

import json
import os
from typing import Any

from celery import Celery

from task_lease import host

#: JSON: the settings, the namespace they are written in, and the name of a host that
#: the worker shall believe to be on.
VARIABLE = "CELERY_TEST_APP"

_given: dict[str, Any] = json.loads(os.environ[VARIABLE])

if _given["host"]:
    host._digest_host = lambda host: f"{_given['host']} {host}"

app = Celery("tests", include=_given["include"])
app.config_from_object(_given["settings"], namespace=_given["namespace"])
