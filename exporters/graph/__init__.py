"""What the planner may ask of a graph, whatever back end holds it."""
