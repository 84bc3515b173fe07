"""The scheduler protocol in one thread: seeded schedules and weak memory, replayable."""
