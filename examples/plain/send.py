"""Publish some delayed tasks. Nothing here knows of the wheel."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from shop import charge, remind

remind.apply_async(["Ada"], countdown=5)
remind.apply_async(["Bob"], eta=datetime.now(timezone.utc) + timedelta(seconds=8))
charge.apply_async([42], countdown=1)
next_year = remind.apply_async(["Eve"], countdown=365 * 86_400)
print(f"Eve is due in a year; she can be revoked: celery -A shop control revoke {next_year.id}")
