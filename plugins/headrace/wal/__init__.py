"""The write-ahead log: rolling segments of checksummed frames, told in ``frame``; written by ``writer``, read by
``reader`` (by handle), ``scan`` (in order) and mended by ``repair``, over any ``storage``."""
