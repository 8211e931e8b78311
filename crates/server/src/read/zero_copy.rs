//! A connection on which the kernel sends the content of an arena without a copy.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;

use super::arena::{Arena, LEAST_BYTES};
#[cfg(target_os = "linux")]
use super::pages::send as send_pages;

/// The most that waits in the kernel before it is on its way. What waits here instead was just verified, and is in the processor's cache.
const WAITING_BYTES: u32 = 256 << 10;

#[cfg(target_os = "linux")]
const MORE_FOLLOWS: i32 = libc::MSG_NOSIGNAL | libc::MSG_MORE;
// Elsewhere, arenas cannot be made.
#[cfg(not(target_os = "linux"))]
const MORE_FOLLOWS: i32 = libc::MSG_NOSIGNAL;
#[cfg(not(target_os = "linux"))]
fn send_pages(_socket: &TcpStream, _content: &[u8]) -> Option<io::Result<usize>> {
    None
}

/// A connection.
pub struct ZeroCopy {
    stream: TcpStream,
    arena: Option<Arc<Arena>>,
}

impl ZeroCopy {
    pub fn new(stream: TcpStream, arena: Option<Arc<Arena>>) -> ZeroCopy {
        // Without these options it is slower, but works. Small responses would wait for more, and much would wait in the kernel.
        let _ = stream.set_nodelay(true);
        #[cfg(target_os = "linux")]
        let _ = SockRef::from(&stream).set_tcp_notsent_lowat(WAITING_BYTES);
        ZeroCopy { stream, arena }
    }

    /// Send the first of these parts: those in usual memory together, or one from the arena.
    fn send(&self, arena: &Arena, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let socket = SockRef::from(&self.stream);
        // The end of a piece may be so short that a copy costs less.
        let has_pages = |part: &IoSlice<'_>| part.len() >= LEAST_BYTES / 2 && arena.holds(part);
        let copied = |parts| socket.send_vectored_with_flags(parts, libc::MSG_NOSIGNAL);
        match parts.iter().position(has_pages) {
            Some(0) => send_pages(&self.stream, &parts[0]).unwrap_or_else(|| copied(&parts[..1])),
            Some(count) => socket.send_vectored_with_flags(&parts[..count], MORE_FOLLOWS),
            None => copied(parts),
        }
    }
}

impl AsyncRead for ZeroCopy {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for ZeroCopy {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let Some(arena) = &self.arena else { return Pin::new(&mut self.stream).poll_write_vectored(context, parts) };
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            match self.stream.try_io(Interest::WRITABLE, || self.send(arena, parts)) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                sent => return Poll::Ready(sent),
            }
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::read::arena::SLOT_BYTES;

    /// Send parts as a connection does, to a client that reads slowly at first, and return what arrives.
    async fn sent(arena: &Arc<Arena>, parts: Vec<bytes::Bytes>) -> Vec<u8> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut wire = ZeroCopy::new(listener.accept().await.unwrap().0, Some(arena.clone()));
        let send = async move {
            let mut left: std::collections::VecDeque<bytes::Bytes> = parts.into();
            while !left.is_empty() {
                let slices: Vec<IoSlice<'_>> = left.iter().map(|part| IoSlice::new(part)).collect();
                let mut count =
                    std::future::poll_fn(|context| Pin::new(&mut wire).poll_write_vectored(context, &slices))
                        .await
                        .unwrap();
                assert!(count > 0);
                while let Some(part) = left.front_mut() {
                    let step = count.min(part.len());
                    bytes::Buf::advance(part, step);
                    count -= step;
                    if !part.is_empty() {
                        break;
                    }
                    left.pop_front();
                }
            }
            wire.shutdown().await.unwrap();
        };
        let receive = async move {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await; // Until buffers are full, so that a send is cut.
            let mut received = Vec::new();
            client.read_to_end(&mut received).await.unwrap();
            received
        };
        tokio::join!(send, receive).1
    }

    #[tokio::test]
    async fn parts_arrive_in_order() {
        let arena = Arena::new(64 * SLOT_BYTES).unwrap();
        let mut parts = vec![bytes::Bytes::from_static(b"headers")];
        for number in 0..40u32 {
            let content: Vec<u8> = (0..SLOT_BYTES as u32).map(|at| (at.wrapping_mul(number + 7) >> 8) as u8).collect();
            let held = arena.store(&content[..content.len() - number as usize]).unwrap();
            // The last part is a short one of the arena, others begin and end anywhere.
            parts.push(held.slice(if number == 39 {
                0..100
            } else {
                number as usize..held.len() - 3 * number as usize
            }));
            parts.extend((number % 3 == 0).then(|| bytes::Bytes::from(vec![number as u8; 5])));
        }
        let expected = parts.concat();
        assert_eq!(sent(&arena, parts).await, expected);
    }

    #[tokio::test]
    async fn a_client_that_left_is_an_error() {
        let arena = Arena::new(4 * SLOT_BYTES).unwrap();
        let held = arena.store(&vec![1; SLOT_BYTES as usize]).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let mut wire = ZeroCopy::new(listener.accept().await.unwrap().0, Some(arena));
        drop(client);
        let mut send = async || {
            let slices = [IoSlice::new(&held)];
            std::future::poll_fn(|context| Pin::new(&mut wire).poll_write_vectored(context, &slices)).await
        };
        let error = loop {
            if let Err(error) = send().await {
                break error;
            }
        };
        assert!(matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{error}");
    }
}
