"""Plans: workflows that are data. A document names steps and what each depends on; an interpreter runs it."""
