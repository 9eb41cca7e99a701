//! The same through TLS: handshakes that are cut at every byte, and what arrives before TLS.

use std::fs;
use std::path::Path;

use testkit::certificates::Authority;

use super::server::Restart;
use super::world::World;
use super::{RESTARTS, SMALL, Script, advance, whole};
use crate::client::{Broken, Client};
use crate::tls::{ClientCredentials, ClientTls, Credentials, ServerTls};
use crate::wire;

struct Pki {
    server: ServerTls,
    authority: Vec<u8>,
    own: (Vec<u8>, Vec<u8>),
}

impl Pki {
    fn new() -> Pki {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(directory.path()).unwrap();
        let (server, client) = (authority.server().unwrap(), authority.client().unwrap());
        let read = |directory: &Path, name: &str| fs::read(directory.join(name)).unwrap();
        let authority = read(&server, "ca-cert.pem");
        let credentials = Credentials {
            certificate: &read(&server, "server-cert.pem"),
            key: &read(&server, "server-key.pem"),
            authority: Some(&authority),
            revoked: None,
        };
        let server = ServerTls::new(&credentials).unwrap();
        Pki { server, authority, own: (read(&client, "client-cert.pem"), read(&client, "client-key.pem")) }
    }

    fn client(&self, own: bool, name: &str) -> ClientTls {
        let own = own.then_some((self.own.0.as_slice(), self.own.1.as_slice()));
        ClientTls::new(&ClientCredentials { authority: &self.authority, revoked: None, own }, name).unwrap()
    }

    fn world(&self, tls: ClientTls) -> World {
        let mut world = World::new(&SMALL, true, None);
        world.client = Client::new("export", true).unwrap().with_tls(tls);
        world.client.sample.block = 4;
        world.server.tls = Some(self.server.clone());
        world
    }
}

/// Runs with a cut after this number of delivered bytes; returns whether it was reached.
fn cut_after(mut world: World, bytes: usize, executes: usize, restart: Restart) -> Result<bool, String> {
    let mut script = Script { portion: bytes, ..whole(bytes, true, true, 8) };
    let mut is_cut = false;
    for step in 0..10_000 {
        if !is_cut && world.delivered == bytes && world.connected {
            world.cut(executes, restart)?;
            is_cut = true;
        }
        if world.is_done() {
            world.check_end()?;
            return Ok(is_cut);
        }
        script.portion = if is_cut { usize::MAX } else { bytes - world.delivered };
        advance(&mut world, &script, step)?;
        if let Some(broken) = &world.broken {
            return Err(format!("the connection was ended: {broken}"));
        }
    }
    Err("the run does not end".to_owned())
}

#[test]
fn a_cut_at_any_byte_through_tls_loses_nothing() {
    let pki = Pki::new();
    let tls = pki.client(true, "localhost");
    let mut bytes = 0;
    loop {
        let (executes, restart) = ([0, 1, 9][bytes % 3], RESTARTS[bytes / 3 % 3]);
        let reached = cut_after(pki.world(tls.clone()), bytes, executes, restart);
        if !reached.unwrap_or_else(|why| panic!("cut after {bytes} bytes, {executes}, {restart:?}: {why}")) {
            break;
        }
        bytes += 1;
    }
    assert!(bytes > 2500, "only {bytes} cuts");
}

/// Connects until the connection is ended; returns the reason.
fn refused(pki: &Pki, tls: ClientTls) -> String {
    let mut world = pki.world(tls);
    world.connect();
    for _ in 0..100 {
        world.send();
        world.deliver_to_server(usize::MAX);
        let bytes = std::mem::take(&mut world.to_client);
        if let Err(broken) = world.client.receive(&bytes) {
            assert!(world.client.export().is_none());
            return broken.to_string();
        }
    }
    panic!("nothing is refused");
}

#[test]
fn a_server_of_another_name_or_authority_is_refused() {
    let (pki, other) = (Pki::new(), Pki::new());
    let said = refused(&pki, pki.client(true, "elsewhere"));
    assert!(said.contains("tls-hostname=NAME"), "{said}");
    let said = refused(&pki, other.client(true, "localhost"));
    assert!(said.contains("not signed by an authority in ca-cert.pem"), "{said}");
}

fn option_reply(option: u32, kind: u32) -> Vec<u8> {
    let magic = wire::OPTION_REPLY_MAGIC.to_be_bytes();
    [&magic[..], &option.to_be_bytes(), &kind.to_be_bytes(), &[0; 4]].concat()
}

/// A client that has received a greeting, and the bytes that it has sent.
fn greeted(pki: &Pki) -> (Client, Vec<u8>) {
    let mut client = Client::new("secret", true).unwrap().with_tls(pki.client(false, "localhost"));
    client.connected();
    let magic = [wire::GREETING_MAGIC.to_be_bytes(), wire::OPTION_MAGIC.to_be_bytes()].concat();
    client.receive(&[&magic[..], &3u16.to_be_bytes()].concat()).unwrap();
    let sent = client.to_send().to_vec();
    client.sent(sent.len());
    (client, sent)
}

#[test]
fn a_server_without_tls_gets_no_other_option() {
    let pki = Pki::new();
    for kind in [wire::REP_ERR_UNSUP, wire::REP_ERR_POLICY] {
        let (mut client, sent) = greeted(&pki);
        assert_eq!(sent.len(), 4 + 16, "only the flags and STARTTLS");
        let refused = client.receive(&option_reply(wire::OPT_STARTTLS, kind));
        assert!(matches!(refused, Err(Broken::TlsRefused(_))), "{refused:?}");
        assert!(client.to_send().is_empty() && client.export().is_none());
    }
}

#[test]
fn bytes_behind_the_reply_to_starttls_are_not_from_the_server() {
    let pki = Pki::new();
    let ready = option_reply(wire::OPT_STARTTLS, wire::REP_ACK);
    let inserted = option_reply(wire::OPT_STRUCTURED_REPLY, wire::REP_ERR_UNSUP);
    for cut in 0..=inserted.len() {
        let (mut client, _) = greeted(&pki);
        let received = client.receive(&[&ready[..], &inserted[..cut]].concat());
        assert_eq!(received.is_err(), cut > 0, "{cut} bytes: {received:?}");
        // Without the end they would be a part of the handshake, and end that.
        let later = received.and_then(|()| client.receive(&inserted));
        assert!(later.is_err() && client.export().is_none());
        let sent = client.to_send();
        assert!(!sent.windows(6).any(|bytes| bytes == b"secret"));
    }
    // A reply to an option that was not sent yet.
    let mut client = Client::new("secret", true).unwrap().with_tls(pki.client(false, "localhost"));
    client.connected();
    let magic = [wire::GREETING_MAGIC.to_be_bytes(), wire::OPTION_MAGIC.to_be_bytes()].concat();
    assert!(client.receive(&[&magic[..], &3u16.to_be_bytes(), &ready].concat()).is_err());
}
