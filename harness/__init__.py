"""The frozen side: worlds, harnesses, the scripted teacher. It knows nothing of training and talks to the planner over HTTP alone."""
