//! The address of an NBD server: a path, or a host and a port; ambiguous ones are rejected.
//!
//! It knows only command lines, and no sockets.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;

use arguments::Serve;
use control::Kind;
use transport::nbd;

use crate::process::failure::Failure;

/// Parses a path, or a host and a port. A word with a slash is a path, and so is a name without a colon. A name that
/// looks like a port or a host is rejected, because it would become a file of that name.
fn nbd_address(word: &str) -> Result<nbd::Address, Failure> {
    let is_number = |port: &str| !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = word.rsplit_once(':').filter(|(_, port)| is_number(port));
    if word.contains('/') {
        return Ok(nbd::Address::Unix(PathBuf::from(word)));
    }
    let doubtful = |port: &str| {
        let why = format!("'{word}' may be meant as {port} or as the name of a socket");
        let advice = format!("write {port} for a port, or ./{word} for a socket");
        Err(Failure::of(Kind::Invalid, format!("cannot serve NBD there: {why}")).advise(advice))
    };
    let address = word.trim_matches(['[', ']']).parse::<IpAddr>();
    if port.is_none() || address.is_ok() {
        return match word {
            _ if is_number(word) => doubtful(&format!("127.0.0.1:{word}")),
            "localhost" => doubtful("localhost:10809"),
            _ => match address {
                Ok(IpAddr::V4(address)) => doubtful(&format!("{address}:10809")),
                Ok(IpAddr::V6(address)) => doubtful(&format!("[{address}]:10809")),
                Err(_) => Ok(nbd::Address::Unix(PathBuf::from(word))),
            },
        };
    }
    let found = word.to_socket_addrs().map_err(|error| {
        Failure::new(format!("resolve the address {word}"), error).advise("use HOST:PORT, or ./NAME for a Unix socket")
    })?;
    let address = found.into_iter().next();
    address.map(nbd::Address::Tcp).ok_or_else(|| Failure::new(format!("resolve the address {word}"), "there is none"))
}

/// Returns where to serve NBD. A writable disk at a network address, where anyone could write to it, needs TLS or an
/// option. Clients over TLS are unknown only if they need not show a certificate, which takes an option, too.
pub(super) fn checked_address(serve: &Serve, word: &str) -> Result<nbd::Address, Failure> {
    let found = nbd_address(word)?;
    let address = match found {
        nbd::Address::Tcp(address) if !address.ip().is_loopback() => address,
        _ => return Ok(found),
    };
    if serve.read_only || serve.nbd_tls.is_some() || serve.allow_unencrypted {
        return Ok(found);
    }
    let why = "all who reach that address could read and write the disk: NBD is served without encryption";
    Err(Failure::of(Kind::Invalid, format!("cannot serve {} at {address}: {why}", serve.image)).advise(
        "require certificates with --nbd-tls, serve at 127.0.0.1 or a Unix socket behind an SSH tunnel, add \
         --read-only, or, in a network that only trusted hosts reach, --allow-unencrypted",
    ))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn addresses_with_a_port_are_tcp_and_others_are_paths() {
        assert_eq!(nbd_address("127.0.0.1:10809").unwrap(), nbd::Address::Tcp("127.0.0.1:10809".parse().unwrap()));
        assert_eq!(nbd_address("[::1]:0").unwrap(), nbd::Address::Tcp("[::1]:0".parse().unwrap()));
        assert_eq!(nbd_address("/run/a:1").unwrap(), nbd::Address::Unix("/run/a:1".into()));
        assert_eq!(nbd_address("a.sock").unwrap(), nbd::Address::Unix("a.sock".into()));
    }

    #[test]
    fn ambiguous_addresses_are_refused_with_both_readings() {
        for (word, port) in [("10809", "127.0.0.1:10809"), ("localhost", "localhost:10809"), ("::1", "[::1]:10809")] {
            let advice = nbd_address(word).unwrap_err().advice().unwrap().to_owned();
            assert_eq!(advice, format!("write {port} for a port, or ./{word} for a socket"));
        }
        assert_eq!(nbd_address("./10809").unwrap(), nbd::Address::Unix("./10809".into()));
    }
}
