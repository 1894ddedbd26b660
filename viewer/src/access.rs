//! Access control for the status page and its API. Pure, except for reading the token and the host
//! name.
//!
//! A listener on a loopback address shows the job to everybody on its host. Any other address
//! requires a token. Requests for a foreign host name are refused: a web site could point its own
//! name at this address, and a browser would then let its scripts read the answers (DNS rebinding).

use std::{
    fs::File,
    io::{self, Read},
    net::IpAddr,
    ops::RangeInclusive,
    path::Path,
};

use axum::http::uri::Authority;
use rustix::system::uname;
use sha2::{Digest, Sha256};

/// The setting that names the file with the token.
pub const TOKEN_FILE: &str = "metrics.token_file";

/// The length of a token, in characters. Shorter ones can be guessed.
const LENGTH: RangeInclusive<usize> = 16..=256;

/// How many bytes of the file are read.
const MAX_FILE: u64 = 4096;

/// Why a file has no usable token.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the texts say what the fields are")]
pub enum TokenError {
    /// The path depends on the folder of the daemon.
    #[error("{TOKEN_FILE} = {path:?} is not an absolute path")]
    Relative { path: String },
    /// The file can't be read.
    #[error("{TOKEN_FILE} = {path:?} can't be read: {reason}; it must be a file on the first host")]
    Unreadable { path: String, reason: io::Error },
    /// The file contains no token.
    #[error(
        "{TOKEN_FILE} = {path:?} contains no token: it must have {first} to {last} visible ASCII \
         characters in one line, such as the output of: openssl rand -hex 32",
        first = LENGTH.start(),
        last = LENGTH.end()
    )]
    Content { path: String },
}

/// The status page and its API require this token. Only its digest is kept, so it can't be printed,
/// and the time of a comparison does not depend on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token([u8; 32]);

impl Token {
    /// The token in a file.
    ///
    /// # Errors
    /// [`TokenError`] with the setting, if the path is relative or the file has no token.
    pub fn read(path: &str) -> Result<Self, TokenError> {
        if !Path::new(path).is_absolute() {
            return Err(TokenError::Relative { path: path.to_owned() });
        }
        let mut text = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MAX_FILE).read_to_end(&mut text))
            .map_err(|reason| TokenError::Unreadable { path: path.to_owned(), reason })?;
        Self::parse(text.trim_ascii()).ok_or_else(|| TokenError::Content { path: path.to_owned() })
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let is_good = LENGTH.contains(&text.len()) && text.iter().all(u8::is_ascii_graphic);
        is_good.then(|| Self(Sha256::digest(text).into()))
    }
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It names another host, or none.
    ForeignHost,
    /// Other hosts can reach the address, and the job has no token.
    Closed,
    /// It has no token.
    NoToken,
    /// It has a wrong token.
    WrongToken,
}

impl Refusal {
    /// What is wrong.
    pub fn what(self) -> &'static str {
        match self {
            Self::ForeignHost => "this request is for another host name",
            Self::Closed => "other hosts can reach this address, but the job has no token",
            Self::NoToken => "a token is required",
            Self::WrongToken => "this is not the token of the job",
        }
    }

    /// What to do.
    pub fn hint(self) -> &'static str {
        match self {
            Self::ForeignHost => "use the IP address, localhost, or the name of the host",
            Self::Closed => {
                "set metrics.token_file to a file with a token, or metrics.listen to a \
                 loopback address"
            }
            Self::NoToken | Self::WrongToken => {
                "send the header \"Authorization: Bearer TOKEN\" with the token in the \
                 file of metrics.token_file"
            }
        }
    }
}

/// The rules by which requests are answered.
#[derive(Debug, Clone)]
pub struct Access {
    names: Vec<String>,
    /// Whether only this host can reach the address.
    is_local: bool,
    token: Option<Token>,
}

impl Access {
    /// For a listener at `listen`. `names` are the names of this host; addresses and `localhost`
    /// are always accepted.
    pub fn new<'a>(
        listen: IpAddr,
        names: impl IntoIterator<Item = &'a str>,
        token: Option<Token>,
    ) -> Self {
        let names = names.into_iter().chain(["localhost"]).map(str::to_ascii_lowercase);
        Self { names: names.collect(), is_local: listen.is_loopback(), token }
    }

    /// The same, with the names of this host in the system and in the launcher, and with the token
    /// in a file unless the path is empty.
    ///
    /// # Errors
    /// [`TokenError`], see [`Token::read`].
    pub fn of_this_host(
        listen: IpAddr,
        launchers_name: &str,
        token_file: &str,
    ) -> Result<Self, TokenError> {
        let token = (!token_file.is_empty()).then(|| Token::read(token_file)).transpose()?;
        let system = uname();
        let name = system.nodename().to_str().unwrap_or_default();
        let short = name.split('.').next().unwrap_or_default();
        let names = [launchers_name, name, short];
        Ok(Self::new(listen, names.into_iter().filter(|name| !name.is_empty()), token))
    }

    /// Whether all requests that are answered have a token. Only then an answer may have what the
    /// secret of the job protects elsewhere: other users of this host can reach a loopback address.
    pub fn has_token(&self) -> bool {
        self.token.is_some()
    }

    /// Whether a request with these headers, `Host` and `Authorization`, may be answered.
    ///
    /// # Errors
    /// [`Refusal`] with the reason.
    pub fn check(&self, host: Option<&str>, authorization: Option<&str>) -> Result<(), Refusal> {
        self.check_host(host)?;
        let Some(token) = &self.token else {
            return if self.is_local { Ok(()) } else { Err(Refusal::Closed) };
        };
        let (scheme, given) = authorization.and_then(|it| it.split_once(' ')).unwrap_or_default();
        if !scheme.eq_ignore_ascii_case("bearer") {
            return Err(Refusal::NoToken);
        }
        let is_right = Token::parse(given.trim().as_bytes()).is_some_and(|given| given == *token);
        if is_right { Ok(()) } else { Err(Refusal::WrongToken) }
    }

    /// Whether a request is for this host. An IP address is always accepted: unlike a name, it
    /// can't be pointed elsewhere.
    ///
    /// # Errors
    /// [`Refusal::ForeignHost`].
    pub fn check_host(&self, host: Option<&str>) -> Result<(), Refusal> {
        let authority: Option<Authority> = host.and_then(|host| host.parse().ok());
        // A `Host` header has no user.
        let authority = authority.filter(|authority| !authority.as_str().contains('@'));
        let is_own = authority.is_some_and(|authority| {
            let name = authority.host().trim_end_matches('.').to_ascii_lowercase();
            let address = name.trim_start_matches('[').trim_end_matches(']');
            address.parse::<IpAddr>().is_ok() || self.names.contains(&name)
        });
        if is_own { Ok(()) } else { Err(Refusal::ForeignHost) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "0123456789abcdef";

    fn access(listen: &str, token: Option<&str>) -> Access {
        let token = token.map(|token| Token::parse(token.as_bytes()).unwrap());
        Access::new(listen.parse().unwrap(), ["Node1", "node1.cluster"], token)
    }

    #[test]
    fn only_requests_for_this_host_are_answered() {
        let access = access("127.0.0.1", None);
        for own in [
            "127.0.0.1:9401",
            "10.1.2.3",
            "[::1]:9401",
            "localhost:1",
            "LocalHost",
            "node1:9401",
            "NODE1.cluster.",
        ] {
            assert_eq!(access.check(Some(own), None), Ok(()), "{own}");
        }
        for foreign in [
            "evil.example:9401",
            "node1.evil.example",
            "127.0.0.1.evil.example",
            "evil.example@127.0.0.1",
            "",
        ] {
            assert_eq!(access.check(Some(foreign), None), Err(Refusal::ForeignHost), "{foreign}");
        }
        assert_eq!(access.check(None, None), Err(Refusal::ForeignHost));
        assert_eq!(access.check(Some("node 1"), None), Err(Refusal::ForeignHost));
    }

    #[test]
    fn an_address_for_other_hosts_needs_a_token() {
        let host = Some("10.0.0.1:9401");
        let bearer = format!("Bearer {TOKEN}");
        assert_eq!(access("0.0.0.0", None).check(host, Some(&bearer)), Err(Refusal::Closed));
        for listen in ["0.0.0.0", "::", "10.0.0.1", "127.0.0.1"] {
            let access = access(listen, Some(TOKEN));
            assert_eq!(access.check(host, None), Err(Refusal::NoToken), "{listen}");
            assert_eq!(access.check(host, Some("Basic abc")), Err(Refusal::NoToken));
            for wrong in ["Bearer", "Bearer ", "Bearer 0123456789abcdeg", "Bearer 0123456789abcde"]
            {
                let refusal = access.check(host, Some(wrong)).unwrap_err();
                assert!(matches!(refusal, Refusal::NoToken | Refusal::WrongToken), "{wrong}");
            }
            assert_eq!(access.check(host, Some(&bearer)), Ok(()));
            assert_eq!(access.check(host, Some(&format!("bearer  {TOKEN} "))), Ok(()));
        }
    }

    #[test]
    fn a_token_is_one_long_word() {
        let folder = std::env::temp_dir().join(format!("gradwire-token-{}", std::process::id()));
        let path = folder.to_str().unwrap();
        for wrong in ["", "short", "0123456789 abcdef", "0123456789abcde\u{e9}", "a\nb"] {
            std::fs::write(path, wrong).unwrap();
            let error = Token::read(path).unwrap_err();
            assert!(matches!(error, TokenError::Content { .. }), "{wrong:?}: {error}");
        }
        std::fs::write(path, format!("{TOKEN}\n")).unwrap();
        let token = Token::read(path).unwrap();
        assert_eq!(Some(&token), Token::parse(TOKEN.as_bytes()).as_ref());
        assert!(!format!("{token:?}").contains(TOKEN));
        std::fs::remove_file(path).unwrap();
        assert!(matches!(Token::read(path), Err(TokenError::Unreadable { .. })));
        assert!(matches!(Token::read("token"), Err(TokenError::Relative { .. })));
    }
}
