"""Looking at a run, live or from its store: gathers, decides what is told, and draws it. Nothing here changes a run."""
