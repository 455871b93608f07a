"""A model of a serving engine: tiered prefix cache, scheduler, cost model, profiles."""
