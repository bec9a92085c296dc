"""Plans: workflows that are data. A document names steps and their dependencies; an interpreter runs it."""
