//! TLS between the network and the client of one connection.
//!
//! It knows nothing about messages. Invariant: from [`Secure::begin`] to [`Secure::end`] no byte goes between the
//! network and the messages but through TLS.

use super::broken::Broken;
use super::incoming::Incoming;
use super::to_send::ToSend;
use crate::tls::{Channel, ClientTls, Error, KEPT_MAX};

/// No record is added to more bytes than this.
const FULL: usize = 1 << 20;

#[derive(Debug, Default)]
pub(super) struct Secure {
    tls: Option<ClientTls>,
    /// Of this connection, once TLS has begun.
    channel: Option<Channel>,
    /// Encrypted.
    records: ToSend,
}

impl Secure {
    pub(super) fn new(tls: ClientTls) -> Secure {
        Secure { tls: Some(tls), ..Secure::default() }
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether TLS has begun on this connection.
    pub(super) fn has_begun(&self) -> bool {
        self.channel.is_some()
    }

    /// Begins TLS.
    pub(super) fn begin(&mut self) -> Result<(), Broken> {
        let Some(tls) = &self.tls else { return Err(Broken::Negotiation("it begins TLS, which was not requested")) };
        self.channel = Some(Channel::of_client(tls).map_err(|error| Broken::tls(&error))?);
        Ok(())
    }

    /// The connection has ended.
    pub(super) fn end(&mut self) {
        self.channel = None;
        self.records.clear();
    }

    /// Takes bytes from the network. Returns the reason if they end the connection, behind the messages in them.
    pub(super) fn receive(&mut self, bytes: &[u8], incoming: &mut Incoming) -> Result<Option<Broken>, Broken> {
        let Some(channel) = &mut self.channel else {
            incoming.push(bytes);
            return Ok(None);
        };
        let decrypted = incoming.push_by(bytes.len() + KEPT_MAX, |room| channel.decrypt(bytes, room));
        decrypted.map_err(|error| Broken::tls(&error))?;
        let ended = || Broken::tls(&Error::General("the server has ended it".to_owned()));
        Ok(channel.is_closed().then(ended))
    }

    /// Bytes for the network: those of `out`, encrypted once TLS has begun.
    pub(super) fn outgoing<'a>(&'a mut self, out: &'a mut ToSend) -> &'a [u8] {
        let Some(channel) = &mut self.channel else { return out.unsent() };
        while self.records.unsent().len() < FULL {
            let encrypted = channel.encrypt(out.unsent());
            out.sent(encrypted);
            if !channel.wants_send() {
                break;
            }
            while channel.wants_send() {
                // Memory takes all of it.
                let Ok(()) = channel.send(self.records.bytes()) else { break };
            }
        }
        self.records.unsent()
    }

    /// Bytes of [`Secure::outgoing`] were sent.
    pub(super) fn sent(&mut self, len: usize, out: &mut ToSend) {
        if self.channel.is_some() { self.records.sent(len) } else { out.sent(len) }
    }
}
