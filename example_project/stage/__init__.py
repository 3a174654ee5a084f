"""The stage of the demo: what starts, watches and draws the example; no part of it."""
