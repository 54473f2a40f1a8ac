"""Control requests, one per file: what operators, routers and training programs ask of a running engine."""
