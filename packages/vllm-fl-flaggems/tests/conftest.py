"""Every kernel runs in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is decorated
sys.path.insert(0, str(Path(__file__).parent))  # for the modules that the tests share

import interpreter

interpreter.repair()
