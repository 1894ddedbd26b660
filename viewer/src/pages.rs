//! The status page and the API over HTTP. docs/api.md describes the API.
//!
//! All content is part of the program: the page loads nothing from elsewhere. Only GET is answered:
//! no request can change a job.

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    extract::{Path, Request, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{
            ACCEPT, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HOST,
            HeaderName, REFERRER_POLICY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
        },
    },
    middleware::{Next, from_fn, from_fn_with_state},
    response::{
        IntoResponse, Response,
        sse::{Event, Sse},
    },
    routing::get,
};
use gradwire_coordinator::Inspection;
use serde_json::json;
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tonic::Code;

use crate::{
    access::{Access, Refusal},
    board::Board,
};

const PAGE: &str = include_str!("../assets/page.html");
const HTML: &str = "text/html; charset=utf-8";
const JSON: &str = "application/json";
const STYLE: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const TEXT: &str = "text/plain; charset=utf-8";

/// The files of the page: name, type and content. They say nothing about a job, so they need no
/// token.
const ASSETS: [(&str, &str, &str); 14] = [
    ("/assets/page.css", STYLE, include_str!("../assets/page.css")),
    ("/assets/pictures.css", STYLE, include_str!("../assets/pictures.css")),
    ("/assets/uplot.css", STYLE, include_str!("../assets/uplot/uPlot.min.css")),
    ("/assets/uplot.js", SCRIPT, include_str!("../assets/uplot/uPlot.iife.min.js")),
    ("/assets/uplot.txt", TEXT, include_str!("../assets/uplot/LICENSE")),
    ("/assets/bars.js", SCRIPT, include_str!("../assets/bars.js")),
    ("/assets/charts.js", SCRIPT, include_str!("../assets/charts.js")),
    ("/assets/rank.js", SCRIPT, include_str!("../assets/rank.js")),
    ("/assets/page.js", SCRIPT, include_str!("../assets/page.js")),
    ("/assets/source.js", SCRIPT, include_str!("../assets/source.js")),
    ("/assets/dom.js", SCRIPT, include_str!("../assets/dom.js")),
    ("/assets/format.js", SCRIPT, include_str!("../assets/format.js")),
    ("/assets/links.js", SCRIPT, include_str!("../assets/links.js")),
    ("/assets/icon.svg", "image/svg+xml", include_str!("../assets/icon.svg")),
];

/// The JSON Schema of the state of a job.
const SCHEMA: &str = include_str!("../../docs/status.schema.json");

/// The content security policy of the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; \
                      frame-ancestors 'none'";

/// The paths of the API.
const PATHS: [(&str, &str); 5] = [
    ("/api/v1/status", "the state of the job"),
    ("/api/v1/watch", "the same as server-sent events, twice per second"),
    ("/api/v1/history", "the last 15 minutes"),
    ("/api/v1/ranks/{rank}", "what a rank does now"),
    ("/api/v1/schema", "the JSON Schema of the state of the job"),
];

/// The page and the API of one job.
pub fn router(inspection: Arc<Inspection>, access: Access) -> Router {
    let access = Arc::new(access);
    let with_stacks = access.has_token();
    let one_rank =
        async move |board: State<Arc<Board>>, at: Path<String>| rank(board, at, with_stacks).await;
    let shown = Router::new()
        .route("/", get(async || ([(CONTENT_TYPE, HTML)], PAGE)))
        .route("/api/v1/", get(index))
        .route("/api/v1", get(index))
        .route("/api/v1/status", get(status))
        .route("/api/v1/watch", get(watch))
        .route("/api/v1/history", get(history))
        .route("/api/v1/ranks/{rank}", get(one_rank))
        .route("/api/v1/schema", get(async || ([(CONTENT_TYPE, JSON)], SCHEMA)))
        .route("/api/{*path}", get(unknown))
        .method_not_allowed_fallback(not_allowed)
        // Only for these paths: metrics may be requested by any host name.
        .route_layer(from_fn_with_state(access.clone(), guarded))
        .with_state(Arc::new(Board::new(inspection)));
    let add = |router: Router, (path, kind, content): (&str, &'static str, &'static str)| {
        router.route(path, get(async move || ([(CONTENT_TYPE, kind)], content)))
    };
    let assets = ASSETS.into_iter().fold(Router::new(), add);
    let assets = assets.route_layer(from_fn_with_state(access, for_this_host));
    shown.merge(assets).route_layer(from_fn(secured))
}

/// Adds the security headers for browsers.
async fn secured(request: Request, next: Next) -> Response {
    const HEADERS: [(HeaderName, &str); 6] = [
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ];
    let mut response = next.run(request).await;
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

async fn for_this_host(
    State(access): State<Arc<Access>>,
    request: Request,
    next: Next,
) -> Response {
    match access.check_host(text(request.headers(), HOST)) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refused(refusal, &request),
    }
}

async fn guarded(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    match access.check(text(headers, HOST), text(headers, AUTHORIZATION)) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refused(refusal, &request),
    }
}

/// The answer to a refused request. A browser gets the page, which asks for the token.
fn refused(refusal: Refusal, request: &Request) -> Response {
    let status = match refusal {
        Refusal::ForeignHost => StatusCode::MISDIRECTED_REQUEST,
        Refusal::Closed => StatusCode::FORBIDDEN,
        Refusal::NoToken | Refusal::WrongToken => StatusCode::UNAUTHORIZED,
    };
    let (what, hint) = (refusal.what(), refusal.hint());
    let mut response = if request.uri().path().starts_with("/api/") {
        error(status, what, hint)
    } else if status == StatusCode::UNAUTHORIZED
        && text(request.headers(), ACCEPT).is_some_and(|kinds| kinds.contains("text/html"))
    {
        (status, [(CONTENT_TYPE, HTML)], PAGE).into_response()
    } else {
        (status, [(CONTENT_TYPE, TEXT)], format!("{what}: {hint}\n")).into_response()
    };
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

fn error(status: StatusCode, what: &str, hint: &str) -> Response {
    let body = json!({"error": what, "hint": hint}).to_string();
    (status, [(CONTENT_TYPE, JSON)], body).into_response()
}

fn over() -> Response {
    let hint = "the output of gradwire run shows how it ended";
    error(StatusCode::SERVICE_UNAVAILABLE, "the job is over", hint)
}

async fn index() -> Response {
    let paths: serde_json::Map<_, _> =
        PATHS.into_iter().map(|(path, what)| (path.to_owned(), what.into())).collect();
    ([(CONTENT_TYPE, JSON)], json!({"paths": paths}).to_string()).into_response()
}

async fn unknown() -> Response {
    let paths = PATHS.map(|(path, _)| path).join(", ");
    let hint = format!("the paths are {paths}");
    error(StatusCode::NOT_FOUND, "there is no such path", &hint)
}

async fn not_allowed() -> Response {
    let hint = "use GET: this API only reads";
    error(StatusCode::METHOD_NOT_ALLOWED, "this method is not allowed", hint)
}

async fn status(State(board): State<Arc<Board>>) -> Response {
    match board.look().await {
        Some(json) => ([(CONTENT_TYPE, JSON)], json.to_string()).into_response(),
        None => over(),
    }
}

async fn history(State(board): State<Arc<Board>>) -> Response {
    ([(CONTENT_TYPE, JSON)], board.over_time().to_string()).into_response()
}

async fn rank(
    State(board): State<Arc<Board>>,
    Path(rank): Path<String>,
    with_stacks: bool,
) -> Response {
    let Some(explained) = board.explain().await else { return over() };
    let number = rank.parse().ok();
    match number.and_then(|rank| crate::rank::of(&explained, rank, with_stacks)) {
        Some(seen) => ([(CONTENT_TYPE, JSON)], seen.to_string()).into_response(),
        None => {
            let what = format!("the job has no rank {rank:?} that is known");
            error(StatusCode::NOT_FOUND, &what, "/api/v1/status lists the ranks")
        }
    }
}

async fn watch(State(board): State<Arc<Board>>) -> Response {
    let watched = match board.watch() {
        Ok(watched) => watched,
        Err(refused) if refused.code() == Code::ResourceExhausted => {
            let hint = "poll /api/v1/status instead";
            return error(StatusCode::TOO_MANY_REQUESTS, refused.message(), hint);
        }
        Err(_) => return over(),
    };
    let events = ReceiverStream::new(watched).map(move |seen| {
        let event = match seen {
            Ok(snapshot) => Event::default().event("status").data(board.json(&snapshot)),
            Err(end) => {
                let reason = json!({"reason": end.message()});
                Event::default().event("end").data(reason.to_string())
            }
        };
        Ok::<Event, Infallible>(event)
    });
    Sse::new(events).into_response()
}
