"""The dashboard: a web page that shows a group while it runs.

`history`, `spans`, `graphs`, `snapshot` and `stuck_tree` turn views of the group into what the page draws. `feed`
gathers views and hands them to browsers. `access` decides who may look. `app` and `server` need starlette and uvicorn,
the extra ``telegrad[dashboard]``, and are imported only by who serves the page.
"""
