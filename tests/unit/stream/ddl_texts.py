"""Texts that Spark 4.2's parser of DDL takes as columns, and texts that it refuses.

tests/integration/spark/test_ddl.py sees that they are that, and test_ddl.py that headrace's own parser does the same.
"""

# fmt: off
TAKEN = [
    "n BOOLEAN", "n TINYINT", "n BYTE", "n SMALLINT", "n SHORT", "n INT", "n INTEGER", "n BIGINT", "n LONG",
    "n FLOAT", "n REAL", "n DOUBLE", "n DATE", "n TIMESTAMP", "n TIMESTAMP_NTZ", "n TIMESTAMP_LTZ", "n STRING",
    "n CHAR(3)", "n CHARACTER(3)", "n VARCHAR(3)", "n BINARY", "n DECIMAL", "n DEC", "n NUMERIC", "n DECIMAL(10)",
    "n DECIMAL(10,2)", "n VOID", "n INTERVAL", "n VARIANT", "n TIME", "n TIME(3)", "n GEOMETRY(4326)",
    "n GEOGRAPHY(4326)", "n GEOGRAPHY(ANY)", "n GEOMETRY(ANY)", "n ARRAY<INT>", "n MAP<STRING,INT>",
    "n MAP<INT,INT>", "n STRUCT<a:INT>", "n STRUCT<a:INT,b:STRING>", "n STRUCT<>", "n STRING COLLATE UTF8_BINARY",
    "n STRING COLLATE UNICODE_CI", "n INTERVAL DAY TO SECOND", "n INTERVAL YEAR", "n INTERVAL YEAR TO MONTH",
    "n INTERVAL HOUR TO MINUTE", "n INT NOT NULL", "n INT COMMENT 'x'", 'n INT COMMENT "x"',
    "n INT NOT NULL COMMENT 'it''s' ", "n ARRAY<STRUCT<a INT, b: ARRAY<MAP<STRING, DECIMAL(3,1)>>>>",
    "n STRUCT<a: INT NOT NULL COMMENT 'x'>", "n TIMESTAMP WITHOUT TIME ZONE", "n TIME WITHOUT TIME ZONE",
    "n TIME(3) WITHOUT TIME ZONE", "n MAP<MAP<INT,INT>,INT>", "n INT COMMENT 'a' 'b'", "n INT COMMENT 'it\\'s'",
    "n STRUCT < a : INT >", "n MAP <STRING , INT>", "n DECIMAL ( 10 , 2 )", "n: INT", "n:INT, m:STRING",
    "n INT, N STRING", "`a b` INT", "`a``b` INT", "1a INT", "_x INT", "_ INT", "select INT", "from STRING",
    "order INT, table STRING", "array ARRAY<INT>", "a INT -- c", "a INT /* c */", "STRUCT<a:INT>",
    "struct<a:INT, b STRING>", "a INT,\n b STRING", "`` INT", "a STRUCT<`x y`:INT>", "struct STRING",
    "interval INT", "timestamp TIMESTAMP", "a INT NOT NULL, b STRING COMMENT 'x', c DATE", "not INT",
    "comment STRING COMMENT 'c'", "anti INT, left STRING", "time TIME", "date DATE, year INT", "0x12 INT",
    "end STRING, begin STRING", "null INT", "true BOOLEAN", "12ab INT", "1_ INT", "1e INT", "5e3x INT",
]

REFUSED = [
    "n CHAR", "n VARCHAR", "n DECIMAL(39,2)", "n DECIMAL(5,6)", "n DECIMAL(10,-2)", "n NULL", "n TIME(9)",
    "n GEOMETRY", "n GEOGRAPHY", "n ARRAY<>", "n ARRAY", "n MAP<STRING>", "n STRUCT", "n INTEGERR", "n TEXT",
    "n NUMBER", "n INT(3)", "n STRING(3)", "n BOOL", "n DATETIME", "n JSON", "n UUID", "n OBJECT", "n LIST<INT>",
    "n TIMESTAMP(3)", "n FLOAT(3)", "n BIGINT(20)", "n DOUBLE(1,2)", "n INTERVAL_DAY", "n TIMESTAMP_NTZ(3)",
    "n STRING_X", "n INTERVAL DAY TO MONTH", "n INTERVAL SECOND TO DAY", "n INTERVAL MONTH TO YEAR",
    "n INTERVAL DAY TO DAY", "n INT NULL", "n INT COMMENT x", "n INT DEFAULT 1", "n ARRAY<INT NOT NULL>",
    "n DOUBLE PRECISION", "n TIMESTAMP WITH TIME ZONE", "n TIME WITH TIME ZONE", "n INT COMMENT 'a' NOT NULL",
    "n INT COLLATE UTF8_BINARY", "n INT NOT NULL NOT NULL", "n INT GENERATED ALWAYS AS (1)",
    "n INT NOT NULL DEFAULT 3", "INT", "n", "n INT,", "n INT; m INT", "'a' INT", '"a" INT', "a.b INT", "a-b INT",
    "1 INT", "1e5 INT", "é INT", "a INT b INT", "a INT /* c", "ARRAY<INT>", "MAP<STRING,INT>", "n INT)", "(n INT)",
    "$a INT", "@a INT", "日本 INT", "n  NOT NULL", "1.5 INT", "1L INT", "n INT NOT", "a: INT: b", "a INT,,b INT",
    ",a INT", "x'12' INT", "a INT as b", "1d INT", "1f INT", "1bd INT", "1s INT", "1y INT", "a IN T",
    "a identifier('x')",
]
# fmt: on
