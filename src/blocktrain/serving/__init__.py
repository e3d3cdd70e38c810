"""Serving: blocks on different hosts, composed into text."""
