"""Help texts that several verbs share. This file imports nothing, so that `--help` is fast."""

from __future__ import annotations

TYPES_HELP = "name=type; type is a dtype (int32, timestamp, duration, time, …), text, bytes, json, category, image (or image:L, RGBA, I;16, stored), boxes:xywh (or xyxy, cxcywh), mask, keypoints, label:cat,dog, labels:cat,dog (a list for each sample; an import takes names that are not given from the data) or tensor:float32:3x?x? (? is a free dimension)"
