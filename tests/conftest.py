"""Settings of the whole suite."""

import os

import torch
from hypothesis import HealthCheck, settings

# No test phones home.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

# Test workers run side by side on few cores; tiny tensors gain nothing from more threads.
torch.set_num_threads(1)

# The machines are shared and noisy: a slow example says nothing about the code.
settings.register_profile("shared-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared-machine")
