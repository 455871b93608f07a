"""What to buy: capacity curves, break-even of a tier, recommendations."""

from replay.plan.advice import Slo
from replay.plan.curve import CurveBuilder, HitCurve, hit_curve
from replay.plan.planner import Plan, plan
from replay.plan.tiers import BreakEven, TierPlan

__all__ = ["BreakEven", "CurveBuilder", "HitCurve", "Plan", "Slo", "TierPlan", "hit_curve", "plan"]
