#!/usr/bin/env bash
# Once before Airflow's components: headrace's user of Elasticsearch, with the privileges that docs/security.md lists, on
# the indices of the streams in dags/. A stream with another index needs it here.
set -euo pipefail
put() {
  curl --retry 5 --silent --show-error --fail-with-body --user "elastic:$ELASTIC_PASSWORD" -X PUT \
    -H 'Content-Type: application/json' --data-binary @- "http://elasticsearch:9200/_security/$1"
  echo
}
put role/headrace <<'JSON'
{
  "cluster": ["monitor"],
  "indices": [
    {
      "names": ["flights"],
      "privileges": ["create_doc", "index", "read", "view_index_metadata", "delete", "maintenance", "auto_configure"]
    },
    {
      "names": ["flights-dead-letters"],
      "privileges": [
        "create_doc", "index", "read", "view_index_metadata", "delete", "maintenance", "create_index", "manage"
      ]
    }
  ]
}
JSON
put user/headrace <<JSON
{"password": "$HEADRACE_ELASTIC_PASSWORD", "roles": ["headrace"]}
JSON
