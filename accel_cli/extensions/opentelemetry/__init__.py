"""Telemetry of a run for OpenTelemetry: spans of what it waits for and does, and metrics, sent by OTLP."""
