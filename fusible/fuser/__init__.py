"""How runs of ops are replaced: conditions, rules, the plan, its execution and explanation."""
