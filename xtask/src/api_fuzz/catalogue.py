# Fails unless the catalogue in argv[1] is sound, has all that its rows refer to, and no lease or claim of nobody's.
import sqlite3
import sys

catalogue = sqlite3.connect(sys.argv[1])
wrong = [row for row in catalogue.execute("PRAGMA integrity_check") if row != ("ok",)]
wrong += catalogue.execute("PRAGMA foreign_key_check").fetchall()
wrong += catalogue.execute(
    "SELECT 'lease', vdi, holder FROM lease WHERE holder NOT IN (SELECT uuid FROM vbd WHERE state <> 'unplugged')"
    " AND holder NOT IN (SELECT uuid FROM task WHERE ended IS NULL)"
).fetchall()
wrong += catalogue.execute(
    "SELECT 'use', sr, task FROM sr_use WHERE task NOT IN (SELECT uuid FROM task WHERE ended IS NULL)"
    " UNION ALL SELECT 'claim', object, task FROM claim WHERE task NOT IN (SELECT uuid FROM task WHERE ended IS NULL)"
).fetchall()
if wrong:
    sys.exit("\n".join(map(str, wrong)))
