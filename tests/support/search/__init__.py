"""Problems of the run search and the stage search, and triples of plan, model and result."""
