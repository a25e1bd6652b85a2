"""The planner: preset + topology -> who runs where, how fast it will be, and why. Torch-free; the door is `plan.py`."""

from ssd_ascend.planner.search import make_plan

__all__ = ["make_plan"]
