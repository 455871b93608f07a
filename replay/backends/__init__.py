"""Who answers: presets, the HTTP client, the launcher and the simulated engine."""
