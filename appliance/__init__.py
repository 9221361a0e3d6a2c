"""The process: builds, owns, starts and stops what serves a model."""
