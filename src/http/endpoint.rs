//! Which operation a request is: method and route template, parameter names erased (R2).

use std::borrow::Cow;

use http::request::Parts;

/// The template of the route that a request took, such as `/orders/{id}/refund`.
///
/// A router puts it into the request's extensions, outside of the layer. With axum and the feature
/// `axum` it is found without.
///
/// ```
/// use http::Request;
/// use oncekey::http::RouteTemplate;
///
/// let mut request = Request::post("/orders/7/refund").body(())?;
/// request.extensions_mut().insert(RouteTemplate::new("/orders/{id}/refund"));
/// # Ok::<(), http::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteTemplate(Cow<'static, str>);

impl RouteTemplate {
    /// The template, with a name between braces for each parameter.
    pub fn new(template: impl Into<Cow<'static, str>>) -> Self {
        Self(template.into())
    }
}

/// `POST /orders/{}/refund`, if the route is known.
pub(super) fn of_route(parts: &Parts) -> Option<String> {
    let template = match parts.extensions.get::<RouteTemplate>() {
        Some(template) => &template.0,
        None => of_router(parts)?,
    };
    let method = parts.method.as_str();
    let mut endpoint = String::with_capacity(method.len() + 1 + template.len());
    endpoint.push_str(method);
    endpoint.push(' ');
    erase_into(template, &mut endpoint);
    Some(endpoint)
}

#[cfg(feature = "axum")]
fn of_router(parts: &Parts) -> Option<&str> {
    crate::axum::template(&parts.extensions)
}

#[cfg(not(feature = "axum"))]
fn of_router(_: &Parts) -> Option<&str> {
    None
}

/// The path with its query as the client sent it.
pub(super) fn path(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    let uri = crate::axum::original_uri(&parts.extensions).unwrap_or(&parts.uri);
    #[cfg(not(feature = "axum"))]
    let uri = &parts.uri;
    uri.path_and_query().map_or("", |path| path.as_str())
}

/// `name` without the parameter names in it.
pub(super) fn erased(name: &str) -> String {
    let mut erased = String::with_capacity(name.len());
    erase_into(name, &mut erased);
    erased
}

/// `{id}` becomes `{}` and `{*rest}` becomes `{*}`; doubled braces are no parameter, and what is
/// not balanced stays as it is.
fn erase_into(template: &str, out: &mut String) {
    let mut rest = template;
    // Bytes, because most templates have neither, and to look for characters takes longer.
    while let Some(at) = rest.bytes().position(|byte| matches!(byte, b'{' | b'}')) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let inside = &rest[1..];
        if rest.starts_with("{{") || rest.starts_with("}}") {
            out.push_str(&rest[..2]);
            rest = &rest[2..];
        } else if let (true, Some(end)) = (rest.starts_with('{'), inside.find('}')) {
            out.push_str(if inside.starts_with('*') { "{*}" } else { "{}" });
            rest = &inside[end + 1..];
        } else {
            out.push_str(&rest[..1]);
            rest = inside;
        }
    }
    out.push_str(rest);
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    #[test]
    fn r2_parameter_names_are_erased_and_nothing_else() {
        for (template, expected) in [
            ("/orders/{id}/refund", "/orders/{}/refund"),
            ("/orders/{order_id}/refund", "/orders/{}/refund"),
            ("/{a}/{b}", "/{}/{}"),
            ("/files/{*rest}", "/files/{*}"),
            ("/a-{b}.json", "/a-{}.json"),
            ("/{{literal}}/{a}", "/{{literal}}/{}"),
            ("/", "/"),
            ("", ""),
            ("/open{", "/open{"),
            ("/close}/{a}", "/close}/{}"),
            ("charges", "charges"),
        ] {
            assert_eq!(erased(template), expected);
            assert_eq!(erased(&erased(template)), expected);
        }
    }

    #[test]
    fn r2_the_endpoint_is_method_and_template() {
        let mut request = Request::patch("/orders/7?x=1").body(()).unwrap();
        request.extensions_mut().insert(RouteTemplate::new("/orders/{id}"));
        let (parts, ()) = request.into_parts();
        assert_eq!(of_route(&parts).unwrap(), "PATCH /orders/{}");
        assert_eq!(path(&parts), "/orders/7?x=1");
        let (bare, ()) = Request::post("/orders/7").body(()).unwrap().into_parts();
        assert_eq!(of_route(&bare), None);
    }
}
