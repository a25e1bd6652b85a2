"""The step loop, its scheduler, and the one place that wires objects together."""
