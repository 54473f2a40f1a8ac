"""What operators, routers and training programs ask of a running engine."""
