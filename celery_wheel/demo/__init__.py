"""``python -m celery_wheel.demo``: the wheel at work, on this machine, with nothing set up."""
