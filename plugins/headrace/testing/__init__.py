"""Tools for tests, public: of this package and of those who build on it."""
