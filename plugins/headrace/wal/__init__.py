"""The write-ahead log: rolling segments of checksummed frames, on any ``storage``.

``frame`` defines the format, ``writer`` appends blocks, ``reader`` reads blocks by handle, ``scan`` reads a segment in
order, ``recovery`` reads a whole log and cuts torn tails off."""
