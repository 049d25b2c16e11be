//! Format of an invitation: one word that contains a hash of the cloud's CA, a secret, and whom it is for.

use std::fmt;
use std::str::FromStr;

use aws_lc_rs::digest::{SHA256, digest};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use crate::invitations::invitee::Invitee;

/// The code of an invitation or a join key. It is a secret; it is displayed in the form that is given to the machine.
#[derive(derive_more::Debug, Clone, PartialEq, Eq)]
#[debug("***")]
pub struct InvitationCode {
    pin: Pin,
    secret: [u8; SECRET_BYTES],
    invitee: Invitee,
}

/// The first half of the SHA-256 of a CA certificate (DER).
pub type Pin = [u8; PIN_BYTES];

/// Returns the pin of a CA certificate (DER).
pub fn pin_of(certificate: &[u8]) -> Pin {
    digest(&SHA256, certificate).as_ref().first_chunk().copied().unwrap_or_default()
}

/// Error parsing an [`InvitationCode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "not an invitation; expected what `tunnel invite` printed: {CODE_CHARS} letters, digits, - and _, then a dot and \
     the node's name or pattern, or the user's name and a slash"
)]
pub struct InvitationCodeError;

impl InvitationCode {
    /// Returns a new code for that node, pattern or user of the cloud with this CA.
    pub fn random(pin: Pin, invitee: Invitee) -> Self {
        Self { pin, secret: rand::random(), invitee }
    }

    /// Returns the node that the machine becomes, the pattern of its name, or the user that it belongs to.
    pub fn invitee(&self) -> &Invitee {
        &self.invitee
    }

    /// Returns the pin of the CA that the server must present.
    pub fn pin(&self) -> Pin {
        self.pin
    }

    /// Returns the secret that identifies the invitation. Only the code's holder knows it: servers store its hash.
    pub fn secret(&self) -> String {
        URL_SAFE_NO_PAD.encode(self.secret)
    }
}

impl FromStr for InvitationCode {
    type Err = InvitationCodeError;

    fn from_str(text: &str) -> Result<Self, InvitationCodeError> {
        let text = text.trim().strip_prefix(CODE_PREFIX).ok_or(InvitationCodeError)?;
        let (text, invitee) = text.split_once('.').ok_or(InvitationCodeError)?;
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvitationCodeError)?;
        let (pin, secret) = bytes.split_first_chunk().ok_or(InvitationCodeError)?;
        match invitee.parse() {
            Err(_) | Ok(Invitee::Device(_)) => Err(InvitationCodeError),
            Ok(invitee) => {
                Ok(Self { pin: *pin, secret: secret.try_into().map_err(|_| InvitationCodeError)?, invitee })
            }
        }
    }
}

impl fmt::Display for InvitationCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = URL_SAFE_NO_PAD.encode([self.pin.as_slice(), &self.secret].concat());
        write!(f, "{CODE_PREFIX}{code}.{}", self.invitee)
    }
}

/// 128 bits, so that no second certificate with the same pin can be found.
const PIN_BYTES: usize = 16;

/// 128 bits, so that the secret cannot be guessed.
const SECRET_BYTES: usize = 16;

/// First character of a code: the encoded text may start with `-`, which a command line would parse as an option.
const CODE_PREFIX: char = 'i';

/// The first character and the base64 of 32 bytes.
const CODE_CHARS: usize = 44;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invitation_code_is_one_word_that_reads_back_as_printed() {
        let node: Invitee = "node7.example.org".parse().unwrap();
        let code = InvitationCode::random([7; PIN_BYTES], node.clone());
        let text = code.to_string();
        assert_eq!(text.len(), CODE_CHARS + ".node7.example.org".len());
        assert_eq!(text.parse::<InvitationCode>().unwrap().invitee(), &node);
        let user = format!("{}alice@example.org/", &text[..=CODE_CHARS]);
        assert_eq!(user.parse::<InvitationCode>().unwrap().invitee(), &"alice@example.org/".parse().unwrap());
        assert_eq!(user.parse::<InvitationCode>().unwrap().to_string(), user);
        assert!(
            !InvitationCode::random([0xf8; PIN_BYTES], node).to_string().starts_with('-'),
            "it would be parsed as an option"
        );
        assert_eq!(format!(" {text}\n").parse(), Ok(code.clone()));
        assert_eq!((code.pin(), format!("{code:?}").as_str()), ([7; PIN_BYTES], "***"));
        let nameless = &text[..CODE_CHARS];
        for bad in [
            "",
            "abc",
            &text[1..],
            nameless,
            &format!("{nameless}A.n"),
            &format!("{nameless}.a/b"),
            &format!("{nameless}./"),
        ] {
            assert_eq!(bad.parse::<InvitationCode>(), Err(InvitationCodeError), "{bad}");
        }
    }
}
